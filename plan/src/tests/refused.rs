//! What there is no plan for is refused, with the reason.

use super::*;

#[test]
fn what_there_is_no_plan_for_is_refused() {
    let hosts = in_pairs(4);
    let shape = Shape { n: 4, rank: 1, root: 0, in_place: true, hosts: &hosts, ..Shape::default() };
    for kind in Kind::ALL {
        assert!(plan(kind, Algo::Auto, &shape).is_err());
        for algo in Algo::ALL {
            assert_eq!(plan(kind, algo, &shape).is_ok(), algorithms(kind).contains(&algo));
        }
        let first = algorithms(kind)[0];
        assert!(plan(kind, first, &Shape { n: 0, ..shape }).is_err());
        assert!(plan(kind, first, &Shape { rank: 4, ..shape }).is_err());
        assert_eq!(plan(kind, first, &Shape { root: 4, ..shape }).is_err(), kind.rooted());
        assert_eq!(plan(kind, first, &Shape { varied: true, ..shape }).is_ok(), kind.varies());
    }
    let said = plan(Kind::Barrier, Algo::Ring, &shape).expect_err("no ring barrier").to_string();
    assert_eq!(said, "barrier by ring: there is no such plan; there is dissemination");
}

#[test]
fn two_levels_need_several_hosts_with_several_ranks() {
    let said = |hosts: &[u32], n| {
        let shape = Shape { n, hosts, ..Shape::default() };
        plan(Kind::AllReduce, Algo::TwoLevel, &shape).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(said(&[0, 0, 1], 3), Ok(()));
    for (hosts, n, why) in [
        (&[][..], 3, "all ranks share one host: there is nothing between hosts"),
        (&[0, 0, 0], 3, "all ranks share one host: there is nothing between hosts"),
        (&[0], 1, "all ranks share one host: there is nothing between hosts"),
        (&[0, 1, 2], 3, "every rank is alone on its host: there is nothing inside hosts"),
        (&[0, 1], 3, "hosts are given for 2 ranks, in a group of 3"),
        (&[0, 0, 2], 3, "hosts are not numbered from 0 without a gap"),
        (&[1, 1, u32::MAX], 3, "hosts are not numbered from 0 without a gap"),
    ] {
        assert_eq!(said(hosts, n), Err(format!("all_reduce by two_level: {why}")));
    }
}

#[test]
fn who_knows_no_counts_passes_nothing_on() {
    let shape = Shape { n: 4, varied: true, ..Shape::default() };
    for kind in [Kind::Gather, Kind::Scatter] {
        let said = plan(kind, Algo::Binomial, &shape).expect_err("inner ranks").to_string();
        let why = "by binomial: with a count for each rank only the root and that rank know it, so no other can \
                   pass it on; use direct";
        assert_eq!(said, format!("{kind} {why}"));
    }
    let said = plan(Kind::AllReduce, Algo::Ring, &shape).expect_err("one count").to_string();
    assert_eq!(said, "all_reduce by ring: there is no form with a count for each rank");
}
