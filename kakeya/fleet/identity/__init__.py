"""Keys, certificates, invites and revocations of a fleet. A node without a certificate of the
fleet cannot join, and a secret never crosses the wire.
"""
