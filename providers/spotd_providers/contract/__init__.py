"""The contract of providers: values, a closed error tree, Protocols. Imports only the standard library."""
