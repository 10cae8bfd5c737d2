"""`python -m pyh2o.cli`."""

from .app import main

if __name__ == "__main__":
    main()
