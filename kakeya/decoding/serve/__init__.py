"""The services that answer other nodes' requests for drafts."""
