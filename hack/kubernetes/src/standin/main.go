// Command standin is, by the name it is started under, one of three small programs that
// the cluster of the end-to-end tests needs and that cannot be had as Go modules:
//
//	pause                       holds a pod's namespaces
//	csi-node-driver-registrar   announces a driver's socket to the kubelet
//	livenessprobe               asks a driver's Probe when asked over HTTP
//
// They take the flags of the real ones that Ashlar's manifests use, and do that much of
// their work. Nobody should run them anywhere else.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

var (
	csiAddress   = flag.String("csi-address", "/run/csi/socket", "the driver's socket, as seen from here")
	registerPath = flag.String("kubelet-registration-path", "", "the driver's socket, as the kubelet sees it")
	httpEndpoint = flag.String("http-endpoint", "", "where to answer /healthz")
	timeout      = flag.Duration("timeout", time.Second, "of a call to the driver")
	probeTimeout = flag.Duration("probe-timeout", 3*time.Second, "of a call of Probe")
	_            = flag.Int("v", 0, "ignored")
)

func main() {
	name := filepath.Base(os.Args[0])
	if name == "pause" {
		pause()
		return
	}
	flag.Parse()
	if err := run(name); err != nil {
		log.Fatal(err)
	}
}

func run(name string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	conn, err := grpc.NewClient("unix://"+*csiAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	driver := csi.NewIdentityClient(conn)
	switch name {
	case "csi-node-driver-registrar":
		err = register(ctx, driver)
	case "livenessprobe":
		err = serveHealth(ctx, func() error {
			ctx, cancel := context.WithTimeout(ctx, *probeTimeout)
			defer cancel()
			answer, err := driver.Probe(ctx, &csi.ProbeRequest{})
			if err == nil && answer.GetReady() != nil && !answer.GetReady().GetValue() {
				err = errors.New("driver responded but is not ready")
			}
			return err
		})
	default:
		return fmt.Errorf("%s: no such program here", name)
	}
	if ctx.Err() != nil {
		return nil // told to stop
	}
	return err
}

// pause waits for the end, and buries the processes that lost their parents.
func pause() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
				break
			}
		}
	}
}

func serveHealth(ctx context.Context, check func() error) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			log.Print("not healthy: ", err)
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	server := &http.Server{Addr: *httpEndpoint, Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	return server.ListenAndServe()
}

// registrar answers the kubelet, which finds its socket in the registration folder.
type registrar struct {
	registration.UnimplementedRegistrationServer
	name    string
	refused chan string
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: r.name, Endpoint: *registerPath, SupportedVersions: []string{"1.0.0"}}, nil
}

func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	log.Printf("the kubelet says: registered %t %s", s.PluginRegistered, s.Error)
	if !s.PluginRegistered {
		r.refused <- s.Error
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func register(ctx context.Context, driver csi.IdentityClient) error {
	var name string
	for name == "" {
		call, cancel := context.WithTimeout(ctx, *timeout)
		info, err := driver.GetPluginInfo(call, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			log.Print("the driver does not answer yet: ", err)
			continue
		}
		name = info.GetName()
	}
	socket := filepath.Join("/registration", name+"-reg.sock")
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	r := &registrar{name: name, refused: make(chan string, 1)}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, r)
	context.AfterFunc(ctx, server.Stop)
	go func() {
		log.Fatal("refused: ", <-r.refused) // the container starts again, and so the kubelet is asked again
	}()
	if *httpEndpoint != "" {
		go func() {
			_ = serveHealth(ctx, func() error { _, err := os.Stat(socket); return err })
		}()
	}
	log.Print("serving the registration of ", name, " at ", socket)
	return server.Serve(listener)
}
