"""What tasks read: the model, samples, traces, trained policies, stored scores."""
