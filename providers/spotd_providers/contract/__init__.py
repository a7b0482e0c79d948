"""What a provider must be: values, a closed error tree, Protocols. Imports only the standard library."""
