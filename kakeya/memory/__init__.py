"""One owner of the machine's bytes. No model loads without a lease in its ledger, and a model in
use is never evicted."""
