"""The ``.ninfer`` v3 container: numeric formats, storage layouts, directory, reader and writer."""
