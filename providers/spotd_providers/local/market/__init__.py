"""The market itself: hosts, prices, machines and books, without any network."""
