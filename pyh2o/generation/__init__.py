"""Drawing tokens: how they are drawn, one loop that draws them, what is drawn again and again."""
