"""The API with `async`. `sandtree._sync` is generated from these files by `scripts/python-sync`."""
