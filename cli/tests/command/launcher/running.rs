//! `allstream trace --pid` asks a running job what it is doing.

use super::*;

/// A rank that reduces over and over until the file that `TEST_END` names exists. Rank 1 is late each time.
#[test]
#[ignore = "a rank; started by other tests"]
fn reduces_until_told() {
    let mut comm = futures::executor::block_on(Comm::connect(Rendezvous::from_env().unwrap())).unwrap();
    let end = PathBuf::from(std::env::var_os("TEST_END").unwrap());
    for round in 0.. {
        if comm.rank() == 1 {
            thread::sleep(Duration::from_millis(20));
        }
        // All stop in the same round.
        let stop = comm.all_reduce(vec![u32::from(end.exists())]).wait().unwrap()[0] > 0;
        if round == 20 && comm.rank() == 0 {
            println!("at work");
        }
        if stop {
            break;
        }
    }
    futures::executor::block_on(comm.close()).unwrap();
}

#[test]
fn a_running_job_tells_who_is_late_and_runs_on() {
    let scratch = Scratch::new();
    let end = scratch.0.join("end");
    let script = format!(
        "exec {} --exact --ignored --nocapture launcher::running::reduces_until_told",
        this_program()
    );
    let mut command = launcher(&["-n", "3"], &script);
    let mut child = command.env("TEST_END", &end).env("ALLSTREAM_TRACE_DIR", "off").spawn().unwrap();
    let pid = child.id().to_string();
    let shown = Shown::new(child.stdout.take().unwrap());
    while !shown.up_to(b'\n', &mut child).contains("at work") {}
    let told = allstream(&["trace", "--times", "--pid", &pid], &[("ALLSTREAM_TUNING", "off")]);
    assert!(told.status.success(), "{told:?}");
    let said = text(&told.stdout);
    assert!(said.contains("3 ranks, 3 files"), "{said}");
    assert!(said.contains("=> It is the code of rank 1: it came last in "), "{said}");
    assert!(child.try_wait().unwrap().is_none(), "it runs on");
    fs::write(&end, "").unwrap();
    assert!(finish(child).status.success());
    let gone = allstream(&["trace", "--pid", &pid], &[]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(text(&gone.stderr).contains("in a world of allstream's"), "{gone:?}");
}
