"""Any OpenStack cloud, as OVHcloud: servers at the prices that your own config states."""
