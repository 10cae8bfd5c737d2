"""OpenAI's words: completions, chats, log probabilities, and a server that speaks them."""
