"""The dashboard: pages in a browser, served by a process of its own that is a client of the daemon like any other."""
