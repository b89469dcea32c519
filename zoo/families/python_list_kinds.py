"""The function kinds of the `python` family that work on lists."""

from __future__ import annotations

from math import prod

from zoo.families.python_kinds import LIST, PAIRED, WORDS, Inputs, Kind

V: Inputs = (([3, 8, 5, 12],), ([7],), ([50, 99, 20, 4, 6],))
E: Inputs = (*V, ([],))
W: Inputs = ((["anna", "bob", "cat"],), (["sea"],), ([],))
STARTS: Inputs = (([text for (text,) in PAIRED],), ([],))


def around(k: int) -> Inputs:
    """Build a list with values on both sides of a constant."""
    return (([k - 1, k, k + 1],),)


def enough(k: int) -> Inputs:
    """Build a list with more values than a constant."""
    return ((list(range(k + 2)),),)


def long_words(k: int) -> Inputs:
    """Build words on both sides of a length."""
    return ((["a" * k, "a" * (k + 1)],),)


LIST_KINDS = (
    Kind(
        "scale_list",
        LIST,
        ("scale_by_{k}", "times_{k}"),
        (
            "Multiply each value by {k}.",
            "Multiply all {a} by {k}.",
            "Return {a} scaled by {k}.",
            "Return all {a} times {k}.",
        ),
        "return [v * {k} for v in {a}]",
        E,
        lambda k, x: [v * k["k"] for v in x],
    ),
    Kind(
        "shift_list",
        LIST,
        ("shift_by_{k}", "add_{k}"),
        (
            "Add {k} to each value.",
            "Add {k} to all {a}.",
            "Return {a} shifted by {k}.",
            "Return all {a} plus {k}.",
        ),
        "return [v + {k} for v in {a}]",
        E,
        lambda k, x: [v + k["k"] for v in x],
    ),
    Kind(
        "squares",
        LIST,
        ("squares", "square_all", "squared"),
        (
            "Square each value.",
            "Return the squares of {a}.",
            "List the square of all {a}.",
        ),
        "return [v * v for v in {a}]",
        E,
        lambda k, x: [v * v for v in x],
    ),
    Kind(
        "keep_above",
        LIST,
        ("above_{k}", "over_{k}"),
        (
            "Keep the {a} above {k}.",
            "Return the {a} greater than {k}.",
            "List all {a} over {k}.",
            "Return the {a} above {k}.",
        ),
        "return [v for v in {a} if v > {k}]",
        E,
        lambda k, x: [v for v in x if v > k["k"]],
        edges=around,
    ),
    Kind(
        "keep_below",
        LIST,
        ("below_{k}", "under_{k}"),
        (
            "Keep the {a} below {k}.",
            "Return the {a} less than {k}.",
            "List all {a} under {k}.",
            "Return the {a} below {k}.",
        ),
        "return [v for v in {a} if v < {k}]",
        E,
        lambda k, x: [v for v in x if v < k["k"]],
        edges=around,
    ),
    Kind(
        "keep_even",
        LIST,
        ("keep_even", "evens", "only_even"),
        ("Keep the even {a}.", "Return the even {a}.", "List all even {a}."),
        "return [v for v in {a} if v % 2 == 0]",
        E,
        lambda k, x: [v for v in x if v % 2 == 0],
    ),
    Kind(
        "sum_even",
        LIST,
        ("sum_even", "even_sum", "add_evens"),
        ("Sum the even {a}.", "Return the sum of even {a}.", "Add the even {a}."),
        "total = 0\n    for v in {a}:\n        if v % 2 == 0:\n            total += v\n    return total",
        E,
        lambda k, x: sum(v for v in x if v % 2 == 0),
    ),
    Kind(
        "sum_all",
        LIST,
        ("sum_all", "add_all", "total"),
        (
            "Sum all {a}.",
            "Return the sum of {a}.",
            "Add all {a}.",
            "Return the sum of all {a}.",
        ),
        "total = 0\n    for v in {a}:\n        total += v\n    return total",
        E,
        lambda k, x: sum(x),
    ),
    Kind(
        "product",
        LIST,
        ("product", "multiply_all", "product_all"),
        ("Multiply all {a}.", "Return the product of {a}.", "Product of all {a}."),
        "result = 1\n    for v in {a}:\n        result *= v\n    return result",
        (([2, 3, 4],), ([],), ([7],)),
        lambda k, x: prod(x),
    ),
    Kind(
        "count_above",
        LIST,
        ("count_above_{k}", "num_over_{k}"),
        (
            "Count the {a} above {k}.",
            "How many {a} are greater than {k}?",
            "Number of {a} over {k}.",
            "How many {a} are above {k}?",
        ),
        "count = 0\n    for v in {a}:\n        if v > {k}:\n            count += 1\n    return count",
        E,
        lambda k, x: sum(v > k["k"] for v in x),
        edges=around,
    ),
    Kind(
        "largest",
        LIST,
        ("largest", "find_max", "max_value"),
        (
            "Return the largest of {a}.",
            "Find the largest value.",
            "Largest of {a}.",
            "Find the largest of {a}.",
        ),
        "best = {a}[0]\n    for v in {a}:\n        if v > best:\n            best = v\n    return best",
        V,
        lambda k, x: max(x),
    ),
    Kind(
        "smallest",
        LIST,
        ("smallest", "find_min", "min_value"),
        (
            "Return the smallest of {a}.",
            "Find the smallest value.",
            "Smallest of {a}.",
            "Find the smallest of {a}.",
        ),
        "best = {a}[0]\n    for v in {a}:\n        if v < best:\n            best = v\n    return best",
        V,
        lambda k, x: min(x),
    ),
    Kind(
        "spread",
        LIST,
        ("spread", "value_range", "width"),
        ("Return the largest minus the smallest.", "Spread of {a}.", "Range of {a}."),
        "return max({a}) - min({a})",
        V,
        lambda k, x: max(x) - min(x),
    ),
    Kind(
        "mean",
        LIST,
        ("mean", "average", "mean_value"),
        (
            "Return the mean of {a}.",
            "Average of {a}.",
            "Mean of all {a}.",
            "Return the average of {a}.",
        ),
        "return sum({a}) / len({a})",
        V,
        lambda k, x: sum(x) / len(x),
    ),
    Kind(
        "nth",
        LIST,
        ("item_{k}", "get_{k}"),
        (
            "Return the item at index {k}.",
            "Get {a} at index {k}.",
            "Element {k} of {a}.",
            "Return {a} at index {k}.",
        ),
        "return {a}[{k}]",
        ((list(range(100, 200)),), (list(range(300, 400)),)),
        lambda k, x: x[k["k"]],
    ),
    Kind(
        "first_k",
        LIST,
        ("first_{k}", "take_{k}"),
        (
            "Return the first {k} {a}.",
            "Take the first {k}.",
            "First {k} of {a}.",
            "Take the first {k} {a}.",
        ),
        "return {a}[:{k}]",
        V,
        lambda k, x: x[: k["k"]],
        edges=enough,
    ),
    Kind(
        "last_k",
        LIST,
        ("last_{k}", "tail_{k}"),
        ("Return the last {k} {a}.", "Take the last {k}.", "Last {k} of {a}."),
        "return {a}[-{k}:]",
        V,
        lambda k, x: x[-k["k"] :],
        edges=enough,
    ),
    Kind(
        "sort_down",
        LIST,
        ("sort_down", "high_to_low", "sorted_down"),
        (
            "Sort {a} from high to low.",
            "Sort {a} in falling order.",
            "Largest {a} first.",
        ),
        "return sorted({a}, reverse=True)",
        E,
        lambda k, x: sorted(x, reverse=True),
    ),
    Kind(
        "contains",
        LIST,
        ("has_{k}", "contains_{k}"),
        (
            "Is {k} in {a}?",
            "Tell whether {a} contain {k}.",
            "Check that {k} is in {a}.",
            "Tell whether {k} is in {a}.",
        ),
        "return {k} in {a}",
        E,
        lambda k, x: k["k"] in x,
        edges=lambda k: (([1, k],),),
    ),
    Kind(
        "join",
        WORDS,
        ("join", "join_all", "glue"),
        (
            "Join {a} with '{s}'.",
            "Return {a} joined by '{s}'.",
            "Put '{s}' between {a}.",
            "Join all {a} by '{s}'.",
        ),
        "return '{s}'.join({a})",
        W,
        lambda k, x: k["s"].join(x),
    ),
    Kind(
        "lengths",
        WORDS,
        ("lengths", "all_lengths", "sizes_of"),
        (
            "Return the length of each of {a}.",
            "List the lengths of {a}.",
            "Lengths of all {a}.",
        ),
        "return [len(w) for w in {a}]",
        W,
        lambda k, x: [len(w) for w in x],
    ),
    Kind(
        "starting",
        WORDS,
        ("starting_{c}", "with_{c}"),
        (
            "Keep the {a} that start with {c}.",
            "Return the {a} starting with {c}.",
            "List all {a} with first letter {c}.",
            "Return the {a} that start with {c}.",
        ),
        "return [w for w in {a} if w.startswith('{c}')]",
        STARTS,
        lambda k, x: [w for w in x if w.startswith(k["c"])],
    ),
    Kind(
        "longer",
        WORDS,
        ("longer_{k}", "long_{k}"),
        (
            "Keep the {a} longer than {k}.",
            "Return the {a} longer than {k}.",
            "List all {a} over {k} letters.",
        ),
        "return [w for w in {a} if len(w) > {k}]",
        W,
        lambda k, x: [w for w in x if len(w) > k["k"]],
        edges=long_words,
    ),
)
