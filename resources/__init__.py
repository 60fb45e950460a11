"""The resources that assets use: table IO, the launcher of GPU processes, and how runs are watched."""
