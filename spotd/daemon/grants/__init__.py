"""Grants for hosts: builder, writer, restore points, secrets."""
