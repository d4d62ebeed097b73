//! A Slurm cluster of one node, which a test starts and removes.

use super::ssh::{done, program};
use super::*;

/// The cluster's daemons, and the directory that holds all that they write. Dropping this ends the daemons.
pub(super) struct Slurm {
    scratch: Scratch,
    daemons: Vec<Child>,
}

impl Slurm {
    /// `None` if this machine cannot have such a cluster; stderr then says why.
    pub(super) fn start() -> Option<Slurm> {
        Slurm::make().inspect_err(|why| others::left_out(&format!("no Slurm of one node: {why}"))).ok()
    }

    fn make() -> Result<Slurm, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("its daemons are run by root, and this test is run by another".into());
        }
        let (munged, slurmctld, slurmd) = (program("munged")?, program("slurmctld")?, program("slurmd")?);
        program("srun")?;
        let mut slurm = Slurm { scratch: Scratch::new(), daemons: Vec::new() };
        let at = |name: &str| slurm.scratch.0.join(name).display().to_string();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let (host, [controller, node]) =
            (host.split('.').next().unwrap_or_default(), [(); 2].map(|()| others::free_port()));
        let lines = [
            "ClusterName=one".into(),
            format!("SlurmctldHost={host}(127.0.0.1)"),
            format!("SlurmctldPort={controller}"),
            format!("SlurmdPort={node}"),
            "SlurmUser=root".into(),
            "AuthType=auth/munge".into(),
            format!("AuthInfo=socket={}", at("munge")),
            format!("StateSaveLocation={}", at("")),
            format!("SlurmdSpoolDir={}", at("")),
            format!("SlurmctldPidFile={}", at("slurmctld.pid")),
            format!("SlurmdPidFile={}", at("slurmd.pid")),
            "ProctrackType=proctrack/linuxproc".into(),
            "TaskPlugin=task/none".into(),
            "ReturnToService=2".into(),
            format!("NodeName={host} NodeAddr=127.0.0.1 CPUs=2"),
            "PartitionName=all Nodes=ALL Default=YES".into(),
        ];
        fs::write(slurm.conf(), lines.join("\n") + "\n").map_err(|e| e.to_string())?;
        let key = at("key");
        fs::write(&key, [7; 128]).map_err(|e| e.to_string())?;
        fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .map_err(|e| e.to_string())?;
        let munge = format!(
            "--foreground --force --key-file={key} --socket={} --pid-file={} --log-file={} --seed-file={}",
            at("munge"),
            at("munged.pid"),
            at("munged.log"),
            at("seed")
        );
        let socket = at("munge");
        slurm.daemon(&munged, munge.split(' '))?;
        wait_until("munge has its socket", || Path::new(&socket).exists());
        slurm.daemon(&slurmctld, ["-D"].into_iter())?;
        slurm.daemon(&slurmd, ["-D"].into_iter())?;
        let end = Instant::now() + DEADLINE;
        loop {
            let idle = "sinfo --noheader --states=idle | grep -q idle";
            match done(Command::new("sh").args(["-c", idle]).env("SLURM_CONF", slurm.conf())) {
                Ok(()) => return Ok(slurm),
                Err(why) if Instant::now() > end => return Err(why),
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// The path of the cluster's configuration, for the variable `SLURM_CONF`.
    pub(super) fn conf(&self) -> String {
        self.scratch.0.join("slurm.conf").display().to_string()
    }

    fn daemon<'a>(&mut self, program: &Path, options: impl Iterator<Item = &'a str>) -> Result<(), String> {
        let mut command = Command::new(program);
        command.args(options).env("SLURM_CONF", self.conf());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.daemons.push(command.spawn().map_err(|e| format!("{}: {e}", program.display()))?);
        Ok(())
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = kill_process(pid_of(daemon.id()), Signal::TERM);
            let end = Instant::now() + Duration::from_secs(5);
            while matches!(daemon.try_wait(), Ok(None)) && Instant::now() < end {
                thread::sleep(Duration::from_millis(5));
            }
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
