"""Files and tables: addresses, local and remote folders, atomic writes, path isolation."""
