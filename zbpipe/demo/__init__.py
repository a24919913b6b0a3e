"""The model and the text that `zbpipe demo` trains."""
