"""The content-addressed cache: keys, entry format, stores, and who uses which entries."""
