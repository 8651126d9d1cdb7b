"""One module per annotation format; `records.READERS` lists them."""
