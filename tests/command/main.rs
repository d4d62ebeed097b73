//! The `allstream` command and the examples, from outside: what they print, and that they leave nothing behind.
#![cfg(feature = "cli")]

mod doctor;
mod examples;
mod launcher;
mod training;
