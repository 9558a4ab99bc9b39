#include "weft/cli.h"

int main(int argc, char** argv) { return weft::cli::main(argc, argv); }
