//! Tests that the structures of [`types`](super::types) have the layout that they have in C.
//!
//! The numbers are those that gcc 12 printed for rdma-core 44's `infiniband/verbs.h` on x86-64: Debian's `libibverbs-dev` 44.0-2. With
//! `ALLSTREAM_TEST_FULL=1` the numbers are compared with the installed header as well, by compiling a small program in C.

use std::mem::offset_of;
use std::process::Command;

use super::types::*;

/// A structure's name in C; its size and its alignment, each as the number in C and the number here; and for each field its path in C, its
/// offset in C, and its offset here.
type Row = (&'static str, [usize; 2], [usize; 2], Vec<(&'static str, usize, usize)>);

macro_rules! layouts {
    ($($type:ident $c:ident $size:literal $align:literal { $($c_field:literal $at:literal $field:ident;)* })*) => {
        fn rows() -> Vec<Row> {
            vec![$((
                stringify!($c),
                [$size, size_of::<$type>()],
                [$align, align_of::<$type>()],
                vec![$(($c_field, $at, offset_of!($type, $field)),)*],
            ),)*]
        }
    };
}

// `IbvContext`, `IbvCq` and `IbvQp` are not in this table: in C they have locks behind the fields that are declared here, so sizes differ.
layouts! {
    IbvDevice ibv_device 664 8 {
        "node_type" 16 node_type; "transport_type" 20 transport_type; "name" 24 name; "dev_name" 88 dev_name;
        "dev_path" 152 dev_path; "ibdev_path" 408 ibdev_path;
    }
    IbvContextOps ibv_context_ops 256 8 {
        "alloc_mw" 56 alloc_mw; "bind_mw" 64 bind_mw; "dealloc_mw" 72 dealloc_mw; "poll_cq" 88 poll_cq;
        "req_notify_cq" 96 req_notify_cq; "post_send" 200 post_send; "post_recv" 208 post_recv;
    }
    IbvDeviceAttr ibv_device_attr 232 8 {
        "node_guid" 64 node_guid; "max_mr_size" 80 max_mr_size; "vendor_id" 96 vendor_id; "max_qp" 108 max_qp;
        "max_qp_wr" 112 max_qp_wr; "device_cap_flags" 116 device_cap_flags; "max_sge" 120 max_sge; "max_cqe" 132 max_cqe;
        "max_mr" 136 max_mr; "max_qp_rd_atom" 144 max_qp_rd_atom; "max_qp_init_rd_atom" 156 max_qp_init_rd_atom;
        "atomic_cap" 164 atomic_cap; "max_mw" 176 max_mw; "max_srq_sge" 220 max_srq_sge; "max_pkeys" 224 max_pkeys;
        "local_ca_ack_delay" 226 local_ca_ack_delay; "phys_port_cnt" 227 phys_port_cnt;
    }
    IbvPortAttr ibv_port_attr 52 4 {
        "active_mtu" 8 active_mtu; "gid_tbl_len" 12 gid_tbl_len; "max_msg_sz" 20 max_msg_sz; "pkey_tbl_len" 32 pkey_tbl_len;
        "lid" 34 lid; "lmc" 38 lmc; "phys_state" 45 phys_state; "link_layer" 46 link_layer; "flags" 47 flags;
        "port_cap_flags2" 48 port_cap_flags2;
    }
    IbvGid ibv_gid 16 8 {}
    IbvGidEntry ibv_gid_entry 32 8 {
        "gid_index" 16 gid_index; "port_num" 20 port_num; "gid_type" 24 gid_type; "ndev_ifindex" 28 ndev_ifindex;
    }
    IbvGlobalRoute ibv_global_route 24 8 {
        "flow_label" 16 flow_label; "sgid_index" 20 sgid_index; "hop_limit" 21 hop_limit; "traffic_class" 22 traffic_class;
    }
    IbvAhAttr ibv_ah_attr 32 8 {
        "dlid" 24 dlid; "sl" 26 sl; "src_path_bits" 27 src_path_bits; "static_rate" 28 static_rate;
        "is_global" 29 is_global; "port_num" 30 port_num;
    }
    IbvQpCap ibv_qp_cap 20 4 { "max_inline_data" 16 max_inline_data; }
    IbvQpInitAttr ibv_qp_init_attr 64 8 {
        "send_cq" 8 send_cq; "recv_cq" 16 recv_cq; "srq" 24 srq; "cap" 32 cap; "qp_type" 52 qp_type; "sq_sig_all" 56 sq_sig_all;
    }
    IbvQpAttr ibv_qp_attr 144 8 {
        "path_mtu" 8 path_mtu; "dest_qp_num" 28 dest_qp_num; "qp_access_flags" 32 qp_access_flags; "cap" 36 cap;
        "ah_attr" 56 ah_attr; "alt_ah_attr" 88 alt_ah_attr; "pkey_index" 120 pkey_index; "max_rd_atomic" 126 max_rd_atomic;
        "max_dest_rd_atomic" 127 max_dest_rd_atomic; "min_rnr_timer" 128 min_rnr_timer; "port_num" 129 port_num;
        "timeout" 130 timeout; "retry_cnt" 131 retry_cnt; "rnr_retry" 132 rnr_retry; "rate_limit" 136 rate_limit;
    }
    IbvSge ibv_sge 16 8 { "length" 8 length; "lkey" 12 lkey; }
    IbvMwBindInfo ibv_mw_bind_info 32 8 { "addr" 8 addr; "length" 16 length; "mw_access_flags" 24 mw_access_flags; }
    IbvMwBind ibv_mw_bind 48 8 { "send_flags" 8 send_flags; "bind_info" 16 bind_info; }
    IbvSendWr ibv_send_wr 128 8 {
        "next" 8 next; "sg_list" 16 sg_list; "num_sge" 24 num_sge; "opcode" 28 opcode; "send_flags" 32 send_flags;
        "imm_data" 36 imm_data; "wr.rdma.remote_addr" 40 remote_addr; "wr.rdma.rkey" 48 rkey; "qp_type" 72 _qp_type;
        "bind_mw.mw" 80 bind_mw; "bind_mw.rkey" 88 bind_rkey; "bind_mw.bind_info" 96 bind_info;
    }
    IbvRecvWr ibv_recv_wr 32 8 { "next" 8 next; "sg_list" 16 sg_list; "num_sge" 24 num_sge; }
    IbvWc ibv_wc 48 8 {
        "status" 8 status; "opcode" 12 opcode; "vendor_err" 16 vendor_err; "byte_len" 20 byte_len; "imm_data" 24 imm_data;
        "qp_num" 28 qp_num; "src_qp" 32 src_qp; "wc_flags" 36 wc_flags; "pkey_index" 40 pkey_index; "slid" 42 slid;
        "sl" 44 sl; "dlid_path_bits" 45 dlid_path_bits;
    }
    IbvMr ibv_mr 48 8 { "pd" 8 pd; "addr" 16 addr; "length" 24 length; "handle" 32 handle; "lkey" 36 lkey; "rkey" 40 rkey; }
    IbvMw ibv_mw 32 8 { "pd" 8 pd; "rkey" 16 rkey; "handle" 20 handle; "type" 24 kind; }
    IbvPd ibv_pd 16 8 { "handle" 8 handle; }
    IbvCompChannel ibv_comp_channel 16 8 { "fd" 8 fd; "refcnt" 12 refcnt; }
    IbvAsyncEvent ibv_async_event 16 8 { "event_type" 8 event_type; }
}

/// The rows of structures whose last fields are not declared here: only offsets are compared.
fn tailed() -> Vec<Row> {
    let no_size = [0, 0];
    vec![
        (
            "ibv_context",
            no_size,
            no_size,
            vec![
                ("device", 0, offset_of!(IbvContext, device)),
                ("ops", 8, offset_of!(IbvContext, ops)),
                ("cmd_fd", 264, offset_of!(IbvContext, cmd_fd)),
                ("async_fd", 268, offset_of!(IbvContext, async_fd)),
                ("num_comp_vectors", 272, offset_of!(IbvContext, num_comp_vectors)),
            ],
        ),
        (
            "ibv_cq",
            no_size,
            no_size,
            vec![
                ("channel", 8, offset_of!(IbvCq, channel)),
                ("cq_context", 16, offset_of!(IbvCq, cq_context)),
                ("handle", 24, offset_of!(IbvCq, handle)),
                ("cqe", 28, offset_of!(IbvCq, cqe)),
            ],
        ),
        (
            "ibv_qp",
            no_size,
            no_size,
            vec![
                ("qp_context", 8, offset_of!(IbvQp, qp_context)),
                ("pd", 16, offset_of!(IbvQp, pd)),
                ("send_cq", 24, offset_of!(IbvQp, send_cq)),
                ("recv_cq", 32, offset_of!(IbvQp, recv_cq)),
                ("srq", 40, offset_of!(IbvQp, srq)),
                ("handle", 48, offset_of!(IbvQp, handle)),
                ("qp_num", 52, offset_of!(IbvQp, qp_num)),
                ("state", 56, offset_of!(IbvQp, state)),
                ("qp_type", 60, offset_of!(IbvQp, qp_type)),
            ],
        ),
    ]
}

#[test]
fn structures_are_laid_out_as_in_c() {
    if cfg!(not(target_pointer_width = "64")) {
        eprintln!("skipped: the numbers are for pointers of 64 bits");
        return;
    }
    for (name, size, align, fields) in rows().into_iter().chain(tailed()) {
        assert_eq!(size[0], size[1], "the size of {name}");
        assert_eq!(align[0], align[1], "the alignment of {name}");
        for (field, in_c, here) in fields {
            assert_eq!(in_c, here, "{name}.{field}");
        }
    }
}

#[test]
fn mtus_are_numbers_that_stand_for_bytes() {
    let bytes = [0, 1, 2, 3, 4, 5, 6].map(|code| Mtu(code).bytes());
    assert_eq!(bytes, [None, Some(256), Some(512), Some(1024), Some(2048), Some(4096), None]);
    assert_eq!(format!("{:?}", PortState(2)), "IBV_PORT_INIT (2)");
    assert_eq!(format!("{:?}", PortState(77)), "PortState 77");
}

/// A program in C that fails to compile if the header disagrees with a number of the tables above, or of the kinds of `types.rs` in `named`.
fn program() -> String {
    let mut text = String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n");
    let mut claim = |condition: String| {
        text += &format!("_Static_assert({condition}, \"differs\");\n");
    };
    for (name, size, align, fields) in rows().into_iter().chain(tailed()) {
        let kind = if name == "ibv_gid" { "union" } else { "struct" };
        if size[0] > 0 {
            claim(format!("sizeof({kind} {name}) == {}", size[0]));
            claim(format!("_Alignof({kind} {name}) == {}", align[0]));
        }
        for (field, at, _) in fields {
            claim(format!("offsetof({kind} {name}, {field}) == {at}"));
        }
    }
    let named = [
        PortState::NAMED,
        EventType::NAMED,
        LinkLayer::NAMED,
        GidType::NAMED,
        Transport::NAMED,
        Mtu::NAMED,
        QpState::NAMED,
        QpType::NAMED,
        QpMask::NAMED,
        Access::NAMED,
        WrOpcode::NAMED,
        SendFlags::NAMED,
        WcStatus::NAMED,
        WcOpcode::NAMED,
    ];
    for (name, value) in named.concat() {
        claim(format!("{name} == {value}"));
    }
    text
}

#[test]
fn the_header_that_is_installed_agrees() {
    if !std::env::var("ALLSTREAM_TEST_FULL").is_ok_and(|full| !full.is_empty() && full != "0") {
        eprintln!("skipped: set ALLSTREAM_TEST_FULL=1");
        return;
    }
    let folder = std::env::temp_dir().join(format!("allstream-sys-verbs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let source = folder.join("layout.c");
    let compile = |text: &str| -> Result<bool, String> {
        std::fs::write(&source, text).unwrap();
        let output = Command::new("cc").arg("-fsyntax-only").arg(&source).output();
        let output = output.map_err(|error| format!("cc: {error}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if said.contains("verbs.h: No such file") {
            return Err("no infiniband/verbs.h; Debian's libibverbs-dev has it".into());
        }
        eprint!("{said}");
        Ok(output.status.success())
    };
    let agrees = compile(&program());
    // A program with a wrong number must not compile.
    let disagrees = compile(&program().replace("sizeof(struct ibv_wc) == 48", "sizeof(struct ibv_wc) == 40"));
    std::fs::remove_dir_all(&folder).unwrap();
    match agrees {
        Err(why) => eprintln!("skipped: {why}"),
        Ok(agrees) => assert!(agrees && disagrees == Ok(false), "the header says otherwise, see above"),
    }
}
