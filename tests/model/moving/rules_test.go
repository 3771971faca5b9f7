package moving

// rules are the guards of the protocol. Each is there because without it something is lost, or stuck; TestEachRule takes them away one by one.
type rules struct {
	// The kernel.
	Hold  bool // a mirror one of whose legs has failed acknowledges nothing
	Range bool // writes are held from the home's answer about ranges until the mirror is in effect

	// Homes.
	Boot          bool // an export ends with the machine's start
	Fence         bool // an export ends before another one begins
	NameWord      bool // Complete and Drop name what was prepared
	PrepareLater  bool // Prepare replaces nothing that was described later
	PrepareAnew   bool // and never answers with what was described earlier
	CompleteFlush bool // Complete flushes
	CompleteBoot  bool // and refuses what is not exported any more since Prepare
	CompleteLater bool // and what has an earlier seal than the one it has
	SealKind      bool // Seal of a volume that nobody uses makes SealFor's anew
	SealStays     bool // SealFor, asked again, answers the same
	SealOpen      bool // Open breaks a seal for the same grant too
	SealWrite     bool // a seal of SealFor breaks with a write of the object
	DepartAsks    bool // the old home gives its bytes back if the new one says that it has all of them
	BackAsks      bool // after the API server went back, the old home asks the new one, if that is up, whether it has taken the volume over
	BackKept      bool // after the API server went back, the new home keeps what its user has completed
	BackLeft      bool // and the old home uses nothing of what it knows that the volume has left
	GarbageLive   bool // what is unfinished is removed if the API server itself says that the volume does not come

	// The consumer.
	Pin          bool // pinned, no leg is dropped without a write of the object
	PinVersion   bool // the pin is refused if the object changed since it was read
	PinOrder     bool // it reads the object before it asks for the seal
	UnsureWrites bool // when it does not know what became of its pin, it writes the object before it goes back to the old leg
	UnsureOwn    bool // if that is about its claim still
	PinStale     bool // a pin of another generation of the object is taken away
	BackHome     bool // it goes back to the old leg only while the object says the old home, whoever has the claim
	SwitchFlip   bool // it goes on over the new leg alone when the object says so, not when it has pinned

	// The controller.
	FlipCurrent bool // copied is of the object's generation
	ReleaseLeft bool // who takes the claim away leaves copied there once the volume has left, as its new node needs it
}

// belts are guards that the protocol has beside others that are enough for all that is modelled: TestBelts takes all of them away.
type belts struct {
	SealCopied    bool // a seal does not break while copied is there for the claim; SealWrite takes that away
	DepartArrived bool // bytes are given back after arrival; for a copy that is lost before, which is not modelled
	PinAlive      bool // it looks at both legs once more before the pin; a mirror with a leg that has failed holds
	FlipClaim     bool // copied is of the claim that there is; FlipCurrent is enough, as a claim is in spec
	Release       bool // who takes the claim away takes copied away too; as FlipClaim
}
