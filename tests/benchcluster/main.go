// Command benchcluster measures the driver in a cluster, and prints the tables of
// docs/benchmarks/cluster.md. tests/benchcluster/run.sh (make bench-cluster) starts what it needs.
//
//	benchcluster cluster --kubeconfig=... --audit=...   in a cluster with the driver in it
//	benchcluster parts                                  its parts against an API server alone
//	benchcluster many                                   the same, with more volumes than can be made in an hour, and deaths
//	benchcluster rest --kubeconfig=...                  its pods at rest, with all that they can show and with nothing of it
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchcluster:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) > 0 {
		switch args[0] {
		case "cluster":
			return measureCluster(ctx, args[1:])
		case "parts":
			return measureParts(ctx, args[1:])
		case "many":
			return measureMany(ctx, args[1:])
		case "agents": // started by many
			return runAgents(ctx, args[1:])
		case "rest":
			return measureRest(ctx, args[1:])
		}
	}
	return fmt.Errorf("what to measure: cluster, parts or rest")
}

// each does n things, up to workers at a time, and returns the first error.
func each(ctx context.Context, n, workers int, do func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	work := func() {
		for i := range next {
			if err := do(ctx, i); err != nil {
				cancel(err)
				return
			}
		}
	}
	var all sync.WaitGroup
	for range workers {
		all.Go(work)
	}
	for i := 0; i < n && ctx.Err() == nil; i++ {
		select {
		case next <- i:
		case <-ctx.Done():
		}
	}
	close(next)
	all.Wait()
	return context.Cause(ctx)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()) }

func sortRows(rows [][]string) {
	slices.SortFunc(rows, slices.Compare)
}
