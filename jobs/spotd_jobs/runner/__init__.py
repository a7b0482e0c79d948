"""The program that carries one attempt on a rented host: standard library only, Python 3.8 and later.

It is shipped as a zipapp (`spotd_jobs.start`) and imports nothing of spotd but itself. Modules that are only needed
over HTTP are imported where they are needed, since a start costs money.
"""

VERSION = "1"
