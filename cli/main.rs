//! The program `allstream`.

use allstream_cli::Exit;

fn main() -> Exit {
    allstream_cli::main(std::env::args_os().skip(1))
}
