"""What is booked and what may still be promised: bills, budgets, balances, traffic."""
