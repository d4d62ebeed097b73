//! Model checks under loom: see tests/.
