"""Files of models, and what is known of them before and after they are loaded."""
