"""The market itself: hosts, prices, machines and ledger, without any network."""
