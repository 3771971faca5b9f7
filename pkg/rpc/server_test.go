package rpc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.opentelemetry.io/otel"
	trace "go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
)

// fake is a service whose answers a test sets.
type fake struct {
	csi.UnimplementedNodeServer
	csi.UnimplementedControllerServer
	csi.UnimplementedSnapshotMetadataServer
	stage  func(context.Context, *csi.NodeStageVolumeRequest) error
	other  error // the error of NodePublishVolume and NodeExpandVolume
	stream func(csi.SnapshotMetadata_GetMetadataAllocatedServer) error
	traced bool
}

func (f *fake) NodeStageVolume(ctx context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, f.stage(ctx, r)
}

func (f *fake) NodePublishVolume(context.Context, *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	return &csi.NodePublishVolumeResponse{}, f.other
}

func (f *fake) NodeExpandVolume(context.Context, *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	return &csi.NodeExpandVolumeResponse{}, f.other
}

func (f *fake) DeleteVolume(context.Context, *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return &csi.DeleteVolumeResponse{}, nil
}

func (f *fake) DeleteSnapshot(context.Context, *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	return &csi.DeleteSnapshotResponse{}, nil
}

func (f *fake) GetMetadataAllocated(_ *csi.GetMetadataAllocatedRequest, s csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	return f.stream(s)
}

// served is a server in this process, with clients.
type served struct {
	csi.NodeClient
	csi.ControllerClient
	csi.SnapshotMetadataClient
	socket string
	log    func() string
	// stop ends the server, and returns the error of Serve and how long it took.
	stop func() (time.Duration, error)
}

func socketPath(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "rpc") // the path of t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "csi.sock")
}

func serveFake(t testing.TB, f *fake) *served {
	t.Helper()
	s := &served{socket: socketPath(t)}
	listener, err := Listen("unix://" + s.socket)
	if err != nil {
		t.Fatal(err)
	}
	logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(10)))
	s.log = func() string { return logger.GetSink().(ktesting.Underlier).GetBuffer().String() }
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))
	ended := make(chan error, 1)
	go func() {
		ended <- Serve(ctx, listener, Services{Node: f, Controller: f, SnapshotMetadata: f, Traced: f.traced})
	}()
	conn, err := grpc.NewClient("unix://"+s.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	s.NodeClient, s.ControllerClient, s.SnapshotMetadataClient = csi.NewNodeClient(conn), csi.NewControllerClient(conn), csi.NewSnapshotMetadataClient(conn)
	var once sync.Once
	s.stop = func() (took time.Duration, err error) {
		once.Do(func() {
			began := time.Now()
			cancel()
			err = <-ended
			took = time.Since(began)
			conn.Close()
		})
		return took, err
	}
	t.Cleanup(func() { _, _ = s.stop() })
	return s
}

// noLeak fails the test if a goroutine of it is left at its end. Call it first.
func noLeak(t testing.TB) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for deadline := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<20)
				t.Errorf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
				return
			}
		}
	})
}

func wants(t testing.TB, err error, code codes.Code) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("got %s, want %s: %v", status.Code(err), code, err)
	}
}

func TestPanic(t *testing.T) {
	noLeak(t)
	f := &fake{stage: func(context.Context, *csi.NodeStageVolumeRequest) error { panic("oh dear") },
		stream: func(csi.SnapshotMetadata_GetMetadataAllocatedServer) error { panic("oh dear") }}
	s := serveFake(t, f)
	for range 2 { // the lock of the first call is free again
		_, err := s.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: volumeID("a")})
		wants(t, err, codes.Internal)
		stream, err := s.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: snapshotID("a")})
		if err == nil {
			_, err = stream.Recv()
		}
		wants(t, err, codes.Internal)
	}
	if !strings.Contains(s.log(), "oh dear") {
		t.Error("the log says nothing of it")
	}
	f.stage = func(context.Context, *csi.NodeStageVolumeRequest) error { return nil }
	_, err := s.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: volumeID("a")})
	wants(t, err, codes.OK)
}

// TestOneCallPerVolume: a second call for a volume gets ABORTED, and succeeds when the first is over. Metrics count both.
func TestOneCallPerVolume(t *testing.T) {
	noLeak(t)
	begun, finish := make(chan struct{}), make(chan struct{})
	s := serveFake(t, &fake{stage: func(context.Context, *csi.NodeStageVolumeRequest) error {
		begun <- struct{}{}
		<-finish
		return nil
	}})
	ended := make(chan error)
	go func() {
		_, err := s.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: volumeID("a")})
		ended <- err
	}()
	<-begun
	before := metricstest.Of(t).Values
	_, err := s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: volumeID("a")})
	wants(t, err, codes.Aborted)
	during := metricstest.Of(t)
	during.Is(t, `ashlar_calls_in_flight{method="NodeStageVolume"}`, 1)
	during.Is(t, `ashlar_calls_in_flight{method="DeleteVolume"}`, 0)
	during.Is(t, `ashlar_calls_busy_total{method="DeleteVolume"}`, before[`ashlar_calls_busy_total{method="DeleteVolume"}`]+1)
	_, err = s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: volumeID("b")})
	wants(t, err, codes.OK)
	close(finish)
	wants(t, <-ended, codes.OK)
	metricstest.Of(t).Is(t, `ashlar_calls_in_flight{method="NodeStageVolume"}`, 0)
	_, err = s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: volumeID("a")})
	wants(t, err, codes.OK)
}

// TestStreamIsLocked: a snapshot is not deleted while a stream reads it.
func TestStreamIsLocked(t *testing.T) {
	noLeak(t)
	finish := make(chan struct{})
	s := serveFake(t, &fake{stream: func(s csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
		if err := s.Send(&csi.GetMetadataAllocatedResponse{}); err != nil {
			return err
		}
		<-finish
		return nil
	}})
	stream, err := s.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: snapshotID("a")})
	if err == nil {
		_, err = stream.Recv()
	}
	wants(t, err, codes.OK)
	_, err = s.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshotID("a")})
	wants(t, err, codes.Aborted)
	close(finish)
	_, _ = stream.Recv() // the end of the stream
	for range 1000 {
		if _, err = s.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshotID("a")}); status.Code(err) != codes.Aborted {
			break
		}
		time.Sleep(time.Millisecond)
	}
	wants(t, err, codes.OK)
}

const secretValue = "s3cr3t-value"

var secretKeys = []string{"csi.storage.k8s.io/serviceAccount.tokens", "password", "clientSecret", "passphrase"}

// fillSecrets puts a secret wherever a message can have one: in the fields that CSI marks, and in all maps, under keys that tell that they are secret.
func fillSecrets(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		switch field := fields.Get(i); {
		case field.IsMap() && field.MapKey().Kind() == protoreflect.StringKind && field.MapValue().Kind() == protoreflect.StringKind:
			values := m.Mutable(field).Map()
			keys := secretKeys
			if proto.GetExtension(field.Options(), csi.E_CsiSecret).(bool) {
				keys = append([]string{"user", "harmless"}, keys...)
			}
			for _, key := range keys {
				values.Set(protoreflect.ValueOfString(key).MapKey(), protoreflect.ValueOfString(secretValue))
			}
		case field.Kind() == protoreflect.MessageKind && field.IsList() && depth < 4:
			fillSecrets(m.Mutable(field).List().AppendMutable().Message(), depth+1)
		case field.Kind() == protoreflect.MessageKind && !field.IsMap() && depth < 4:
			fillSecrets(m.Mutable(field).Message(), depth+1)
		}
	}
}

// TestNoSecretIsPrinted: no message of CSI is printed with a secret.
func TestNoSecretIsPrinted(t *testing.T) {
	messages := csi.File_csi_proto.Messages()
	filled := 0
	for i := range messages.Len() {
		kind, err := protoregistry.GlobalTypes.FindMessageByName(messages.Get(i).FullName())
		if err != nil {
			t.Fatal(err)
		}
		message := kind.New()
		fillSecrets(message, 0)
		before, _ := proto.MarshalOptions{Deterministic: true}.Marshal(message.Interface())
		if strings.Contains(string(before), secretValue) {
			filled++
		}
		if text := printable(message.Interface()); strings.Contains(text, secretValue) {
			t.Errorf("%s is printed as %s", messages.Get(i).Name(), text)
		}
		after, _ := proto.MarshalOptions{Deterministic: true}.Marshal(message.Interface())
		if string(before) != string(after) {
			t.Errorf("printing changed %s", messages.Get(i).Name())
		}
	}
	if filled < 20 {
		t.Errorf("only %d messages could be given a secret", filled)
	}
	if text := printable(&csi.NodePublishVolumeRequest{VolumeId: "an ID", VolumeContext: map[string]string{"size": "1Gi"}}); !strings.Contains(text, "an ID") || !strings.Contains(text, "1Gi") {
		t.Errorf("what is no secret is not printed: %s", text)
	}
	for _, nothing := range []any{nil, (*csi.NodePublishVolumeRequest)(nil), 7} {
		_ = printable(nothing) // must not panic
	}
	if text := printable(wrapperspb.Bytes([]byte(`{"secret":"` + secretValue + `"}`))); text != fmt.Sprintf("%d bytes", len(secretValue)+len(`{"secret":""}`)) {
		t.Errorf("a message in bytes is printed as %s", text)
	}
}

// TestNoSecretIsLogged: secrets are not in the log, at the highest verbosity, nor in traces, nor in the errors of calls: whether a call succeeds, fails,
// panics, or finds the volume busy.
func TestNoSecretIsLogged(t *testing.T) {
	spans, before := tracetest.NewInMemoryExporter(), otel.GetTracerProvider()
	otel.SetTracerProvider(sdk.NewTracerProvider(sdk.WithSyncer(spans)))
	defer otel.SetTracerProvider(before)
	f := &fake{traced: true}
	s := serveFake(t, f)
	inContext := map[string]string{"harmless": "context"}
	for _, key := range secretKeys {
		inContext[key] = secretValue
	}
	secrets := map[string]string{"passphrase": secretValue, "user": secretValue}
	clean := func(err error) {
		if text := fmt.Sprintf("%+v", status.Convert(err).Proto()); strings.Contains(text, secretValue) {
			t.Errorf("the error has a secret: %s", text)
		}
	}
	stage := func() error {
		_, err := s.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "staged-volume", Secrets: secrets, VolumeContext: inContext})
		clean(err)
		return err
	}
	for _, end := range []func() error{
		func() error { return nil },
		func() error { return errdefs.ErrInvalid },
		func() error { return errors.New("surprise") },
		func() error { panic("a bug") },
	} {
		f.stage = func(_ context.Context, r *csi.NodeStageVolumeRequest) error {
			if r.GetSecrets()["passphrase"] != secretValue {
				t.Error("the service did not get its secret")
			}
			return end()
		}
		if f.other = nil; stage() != nil {
			f.other = errors.New("surprise")
		}
		_, err := s.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: "published-volume", Secrets: secrets, VolumeContext: inContext})
		clean(err)
		_, err = s.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: "grown-volume", Secrets: secrets})
		clean(err)
		_, err = s.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "deleted-volume", Secrets: secrets})
		clean(err)
	}
	f.stage = func(context.Context, *csi.NodeStageVolumeRequest) error {
		f.stage = func(context.Context, *csi.NodeStageVolumeRequest) error { return nil }
		wants(t, stage(), codes.Aborted) // the volume is busy
		return nil
	}
	wants(t, stage(), codes.OK)
	if _, err := s.stop(); err != nil {
		t.Fatal(err)
	}
	log := s.log()
	if strings.Contains(log, secretValue) {
		t.Errorf("the log has a secret:\n%s", log)
	}
	for _, want := range []string{"staged-volume", "published-volume", "grown-volume", "deleted-volume", "harmless", "stripped", "surprise", "a bug"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log says nothing of %q:\n%s", want, log)
		}
	}
	if traced := fmt.Sprintf("%+v", spans.GetSpans()); strings.Contains(traced, secretValue) || !strings.Contains(traced, "NodeExpandVolume") {
		t.Errorf("the spans: %s", traced)
	}
}

// TestNoTextIsTraced: the span of a call has the code of its error, but not its text, which may have what is for the log alone.
func TestNoTextIsTraced(t *testing.T) {
	spans, before := tracetest.NewInMemoryExporter(), otel.GetTracerProvider()
	otel.SetTracerProvider(sdk.NewTracerProvider(sdk.WithSyncer(spans)))
	defer otel.SetTracerProvider(before)
	const text = "mount: unknown option password=12345"
	s := serveFake(t, &fake{traced: true,
		stage:  func(context.Context, *csi.NodeStageVolumeRequest) error { return errors.New(text) },
		stream: func(csi.SnapshotMetadata_GetMetadataAllocatedServer) error { return errors.New(text) }})
	_, err := s.NodeStageVolume(context.Background(), &csi.NodeStageVolumeRequest{VolumeId: "v"})
	wants(t, err, codes.Internal)
	if status.Convert(err).Message() != text {
		t.Errorf("the caller got %q", err)
	}
	stream, err := s.GetMetadataAllocated(context.Background(), &csi.GetMetadataAllocatedRequest{SnapshotId: "s"})
	if err == nil {
		_, err = stream.Recv()
	}
	wants(t, err, codes.Internal)
	if _, err := s.stop(); err != nil {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	if len(got) != 2 {
		t.Fatalf("%d spans of two calls: %+v", len(got), got)
	}
	for _, span := range got {
		if all := fmt.Sprintf("%+v", span); span.Status.Code != trace.Error || !strings.Contains(all, "INTERNAL") || strings.Contains(all, "12345") {
			t.Errorf("the span of a call that failed: %s", all)
		}
	}
}

func TestLargeMessage(t *testing.T) {
	noLeak(t)
	s := serveFake(t, &fake{stage: func(context.Context, *csi.NodeStageVolumeRequest) error { return nil }})
	_, err := s.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: strings.Repeat("x", 4<<20)})
	wants(t, err, codes.ResourceExhausted)
	_, err = s.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: strings.Repeat("x", 3<<20)})
	wants(t, err, codes.OK)
}

func TestUnknownMethods(t *testing.T) {
	s := serveFake(t, &fake{})
	_, err := s.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	wants(t, err, codes.Unimplemented)
}

// TestDrain: when the server stops, a call in flight ends as usual, and new calls are not accepted.
func TestDrain(t *testing.T) {
	noLeak(t)
	for try := range 10 {
		begun, finish := make(chan struct{}), make(chan struct{})
		s := serveFake(t, &fake{stage: func(ctx context.Context, _ *csi.NodeStageVolumeRequest) error {
			close(begun)
			<-finish
			return ctx.Err()
		}})
		ended := make(chan error, 1)
		go func() {
			_, err := s.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "a"})
			ended <- err
		}()
		<-begun
		var finished atomic.Bool
		go func() {
			time.Sleep(300 * time.Millisecond)
			finished.Store(true)
			close(finish)
		}()
		took, err := s.stop()
		answer := <-ended
		if took > 3*time.Second && try < 9 {
			continue // the machine stalls: the call may have got less time than it needs
		}
		if err != nil || !finished.Load() || took > 3*time.Second {
			t.Errorf("stopped after %s, the call has ended: %v: %v", took, finished.Load(), err)
		}
		wants(t, answer, codes.OK)
		if _, err := os.Lstat(s.socket); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
		return
	}
}

// TestDrainStuck: the driver ends soon, whatever its calls do.
func TestDrainStuck(t *testing.T) {
	for name, c := range map[string]struct {
		wait func(ctx context.Context, released <-chan struct{})
		ends bool // its call ends when it is cancelled
	}{
		"in something that can be cancelled":    {func(ctx context.Context, _ <-chan struct{}) { <-ctx.Done() }, true},
		"in something that cannot be cancelled": {func(_ context.Context, released <-chan struct{}) { <-released }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begun, released := make(chan struct{}), make(chan struct{})
			s := serveFake(t, &fake{stage: func(ctx context.Context, _ *csi.NodeStageVolumeRequest) error {
				close(begun)
				c.wait(ctx, released)
				return ctx.Err()
			}})
			ended := make(chan error, 1)
			go func() {
				_, err := s.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "a"})
				ended <- err
			}()
			<-begun
			took, err := s.stop()
			if took < 3*time.Second || took > 30*time.Second {
				t.Errorf("stopped after %s", took)
			}
			if (err == nil) != c.ends {
				t.Errorf("stopped with %v", err)
			}
			if err := <-ended; status.Code(err) != codes.Unavailable && status.Code(err) != codes.Canceled {
				t.Errorf("the error does not say that the work may be going on: %v", err)
			}
			close(released)
			if _, err := os.Lstat(s.socket); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the socket is left: %v", err)
			}
		})
	}
}

// TestCallerGoesAway: the context of a call ends with its caller.
func TestCallerGoesAway(t *testing.T) {
	noLeak(t)
	over := make(chan error, 1)
	begun := make(chan struct{})
	s := serveFake(t, &fake{stage: func(ctx context.Context, _ *csi.NodeStageVolumeRequest) error {
		close(begun)
		<-ctx.Done()
		over <- ctx.Err()
		return ctx.Err()
	}})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-begun; cancel() }()
	_, err := s.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: "a"})
	wants(t, err, codes.Canceled)
	if err := <-over; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestListenAtOnce: listeners that are opened at the same time leave the mask of the process unchanged.
func TestListenAtOnce(t *testing.T) {
	before := unix.Umask(0o022)
	defer unix.Umask(before)
	dir := filepath.Dir(socketPath(t))
	for round := range 20 {
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				listener, err := Listen(fmt.Sprintf("unix://%s/%d-%d", dir, round, i))
				if err != nil {
					t.Error(err)
					return
				}
				listener.Close()
			})
		}
		all.Wait()
	}
	if mask := unix.Umask(0o022); mask != 0o022 {
		t.Errorf("the mask is %#o", mask)
	}
}

func TestListen(t *testing.T) {
	path := filepath.Join(filepath.Dir(socketPath(t)), "run", "ashlar", "csi.sock") // the directories are missing, as on a machine that was just started
	listener, err := Listen("unix://" + path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("the socket is %v: %v", info.Mode(), err)
	}
	file := filepath.Join(filepath.Dir(path), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode() != 0o644 {
		t.Errorf("the process's mask has changed: %v %v", info.Mode(), err)
	}

	if second, err := Listen("unix://" + path); !errors.Is(err, errdefs.ErrInUse) {
		t.Errorf("a second listener on a live socket: %v, %v", second, err)
	}
	// A process that was killed leaves its socket.
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	listener.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
	listener, err = Listen("unix://" + path)
	if err != nil {
		t.Fatalf("a stale socket: %v", err)
	}
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			conn.Close()
		}
	}()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Errorf("nobody listens where the stale socket was: %v", err)
	} else {
		conn.Close()
	}
	listener.Close()

	for name, make := range map[string]func() error{
		"a file":              func() error { return os.WriteFile(path, []byte("precious"), 0o600) },
		"a directory":         func() error { return os.Mkdir(path, 0o700) },
		"a link to something": func() error { return os.Symlink(file, path) },
	} {
		t.Run(name, func(t *testing.T) {
			if err := make(); err != nil {
				t.Fatal(err)
			}
			if _, err := Listen("unix://" + path); !errors.Is(err, errdefs.ErrExists) {
				t.Errorf("got %v", err)
			}
			if _, err := os.Lstat(path); err != nil {
				t.Errorf("it is gone: %v", err)
			}
			_ = os.Remove(path)
		})
	}
	if _, err := Listen("unix://" + filepath.Join(file, "csi.sock")); err == nil {
		t.Error("listens below a file")
	}
}

func TestParseEndpoint(t *testing.T) {
	for endpoint, want := range map[string]string{
		"unix:///csi/csi.sock": "/csi/csi.sock", "unix:/csi/csi.sock": "/csi/csi.sock", "/csi/csi.sock": "/csi/csi.sock",
		"": "", "csi.sock": "", "unix://csi/csi.sock": "", "tcp://127.0.0.1:1": "", "http:///csi.sock": "", "unix:": "", "unix:csi.sock": "",
		"unix:///" + strings.Repeat("x", 107): "", "unix:///" + strings.Repeat("x", 106): "/" + strings.Repeat("x", 106),
	} {
		path, err := ParseEndpoint(endpoint)
		if path != want || (want == "") != errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%q: %q, %v", endpoint, path, err)
		}
	}
}
