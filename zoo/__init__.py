"""The recipe of the shipped model: data, tokenizer, training, export, evaluation; not part of the installed package."""
