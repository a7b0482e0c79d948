"""An object store as hosts reach it: the standard library only, for images with Python 3.8."""
