from tad.cli import main

main()
