"""Other ecosystems: what makes spot_dlm a part of them, one package or module for each; nothing here is imported by the library itself."""
