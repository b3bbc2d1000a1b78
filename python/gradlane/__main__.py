"""`python -m gradlane`: the same as the `gradlane` command."""

from gradlane.commands.cli import main

if __name__ == "__main__":
    main()
