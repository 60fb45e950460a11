"""Output folders at an address: files that steps and commands fetch and upload, and leases."""
