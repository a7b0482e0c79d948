"""Verda, formerly DataCrunch: virtual machines at fixed spot and on-demand prices."""
