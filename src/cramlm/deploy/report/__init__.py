"""A run as one page to look at: `cramlm report RUN`. facts.py reads the folder, four files write sections, page.py joins them."""
