"""HTTP: requests in the dialects of agents, streamed answers, errors that name the parameter."""
