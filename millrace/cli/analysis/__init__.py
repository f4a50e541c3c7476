"""Commands that judge jobs: compare two, or say what slows one down."""
