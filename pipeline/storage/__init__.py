"""Files: addresses, local and remote sources, atomic writes, tables and path isolation."""
