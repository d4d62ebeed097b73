//! The `allstream` command and the examples, from outside: what they print, and that they leave nothing behind.

mod devices;
mod doctor;
mod examples;
mod launcher;
mod rdma;
mod rdma_calls;
mod rdma_ports;
mod recorder;
mod training;
