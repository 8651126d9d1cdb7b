"""Many images on many machines, and models in other programs' formats."""
