"""`accelerate launch` in a process that ends when the process that started it ends."""

from __future__ import annotations

from accelerate.commands.launch import main

if __name__ == "__main__":
    main()
