"""`python -m autopar`, and what the `autopar` script and `torchrun -m autopar` start."""

from __future__ import annotations

from autopar.cli import main

if __name__ == "__main__":
    main()
