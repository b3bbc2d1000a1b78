"""`python -m gradlane`: the same as the `gradlane` command."""

from gradlane.cli.main import main

if __name__ == "__main__":
    main()
