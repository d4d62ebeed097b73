//! Model checks under loom: see `tests/`. Run with `cargo test -p loom-tests`.
