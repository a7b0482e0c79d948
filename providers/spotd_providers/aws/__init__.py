"""Amazon EC2: spot and on-demand GPU instances, through AWS's own client."""
