// Command serve starts API servers for tests in a virtual machine (apitest.Serve). It prints the port on loopback that it listens on. SIGTERM ends it and the
// servers.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/ashlar-csi/ashlar/internal/apitest"
)

func main() {
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, "serve:", err)
		os.Exit(1)
	}
}

func serve() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	return apitest.Serve(ctx, listener)
}
