"""Time per client-step of Flower's simulation on Ray on the public pfl-research CIFAR-10 workload, on the CPU.

    python benchmarks/peers/flower.py [--rounds 4] [--users 1000] [--cohort 50] [--cpus-per-client 1]

Runs in a virtual environment with requirements-flower.txt installed (run.py makes it). Prints one line of JSON.
The module and the images stay in the actors between clients, and batches are slices: less work than the usual
example, which builds both anew. Ray starts during Flower's first round, so first_round_s holds it, not start_s.
"""

import os
import tempfile
import time


def main():
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
        os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        simulate(folder, begun)


def simulate(folder, begun):
    import workload  # imports are in here because they are part of the time to start, and read the settings above

    chosen = workload.options(
        "Flower's simulation on the public pfl-research CIFAR-10 workload",
        ("--cpus-per-client", {"type": int, "default": 1, "help": "threads of an actor (default: 1)"}),
    )
    stdout = workload.divert_stdout()

    import flwr
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    clients = ClientApp()

    @clients.train()
    def train(message, context):
        import flower_client  # by name, not by value: what it keeps stays in the actor

        state, steps, threads = flower_client.train(
            message.content["arrays"].to_torch_state_dict(),
            user=context.node_config["partition-id"],
            **message.content["config"],
        )
        counts = MetricRecord({"num-examples": workload.SAMPLES, "steps": steps, "threads": threads})
        return Message(RecordDict({"arrays": ArrayRecord(state), "counts": counts}), reply_to=message)

    class Timed(FedAvg):
        """FedAvg that notes when a round begins and ends, and what its clients counted."""

        def __init__(self):
            super().__init__(
                fraction_train=chosen.cohort / chosen.users,
                min_train_nodes=chosen.cohort,
                min_available_nodes=chosen.users,
                fraction_evaluate=0.0,
            )
            self.begun, self.ended, self.steps, self.threads = [], [], [], set()

        def configure_train(self, server_round, arrays, config, grid):
            self.begun.append(time.perf_counter())
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            for reply in replies:
                if reply.has_error():
                    raise RuntimeError(f"a client failed: {reply.error.reason}")
            counts = [reply.content["counts"] for reply in replies]
            self.steps.append(sum(count["steps"] for count in counts))
            self.threads.update(count["threads"] for count in counts)
            aggregated = super().aggregate_train(server_round, replies)
            self.ended.append(time.perf_counter())
            return aggregated

    server, strategy = ServerApp(), Timed()

    @server.main()
    def serve(grid, context):
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(workload.network().state_dict()),
            num_rounds=chosen.rounds,
            train_config=ConfigRecord(
                {
                    "users": chosen.users,
                    "threads": chosen.cpus_per_client,
                    "channels_last": chosen.channels_last,
                }
            ),
        )

    run_simulation(
        server_app=server,
        client_app=clients,
        num_supernodes=chosen.users,
        backend_config={
            "init_args": {
                "num_cpus": chosen.cores,
                "num_gpus": 0,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",  # else Ray looks for a route to the outside
                "_temp_dir": folder,
            },
            "client_resources": {"num_cpus": chosen.cpus_per_client, "num_gpus": 0.0},
        },
    )
    (threads,) = strategy.threads
    workload.report(
        stdout,
        chosen,
        peer="flower",
        version=flwr.__version__,
        threads=threads * (chosen.cores // chosen.cpus_per_client),
        actors=chosen.cores // chosen.cpus_per_client,
        start=strategy.begun[0] - begun,
        rounds=[end - start for start, end in zip(strategy.begun, strategy.ended, strict=True)],
        steps=strategy.steps,
    )


if __name__ == "__main__":
    main()
